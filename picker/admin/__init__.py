"""The operator's side: metrics, health, the dashboard, decisions, and the Introspection API."""
