"""The pool from Kubernetes: an InferencePool, its pods, and what their nodes and objectives add."""
