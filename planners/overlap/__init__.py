"""Orders of the ops of a step that hide communication."""
