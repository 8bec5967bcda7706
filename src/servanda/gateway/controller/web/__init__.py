# The controller's listener: what gateways follow, what people ask and decide, metrics and the page.
