"""The dashboard's page: HTML, CSS and JavaScript modules, served without a build step."""
