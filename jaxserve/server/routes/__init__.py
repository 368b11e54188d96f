"""The endpoints of the API, one module per resource."""
