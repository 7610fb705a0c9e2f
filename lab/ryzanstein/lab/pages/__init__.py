"""What looks at the console as a person does: a browser, a console, and a router that answers what one writes."""
