"""The plugin `kubectl picker`: look at a picker in a cluster, and steer its pods and its policy."""
