# The controller's listener: routes for gateways, requests of people, metrics and the page.
