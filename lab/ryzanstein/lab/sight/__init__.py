"""What operators see: objectives, rules and dashboards of k8s/components/monitoring, and recorded faults to test them."""
