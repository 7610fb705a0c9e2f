"""Commands that change what a running cluster serves: deploy, drain, and waiting for both."""
