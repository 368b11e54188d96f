"""The chat page and the reference of the API: HTML, CSS and JavaScript modules, served without a build step."""
