"""What users do to the compiled model afterwards: settings, hooks, attributes."""
