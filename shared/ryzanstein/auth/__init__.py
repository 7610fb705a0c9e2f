"""Who calls, and what they may do: values and rules that the services and the command line share."""
