"""The dashboard's page: HTML, CSS and JavaScript modules, served as they lie here."""
