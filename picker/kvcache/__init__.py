"""What each endpoint has in its KV cache: block keys, the index, engine events, and predictions."""
