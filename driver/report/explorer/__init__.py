"""The pass explorer: a pipeline as one HTML page that a browser shows."""
