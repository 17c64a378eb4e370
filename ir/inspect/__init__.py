"""How a person looks at a program: outline, diff, HTML, statistics."""
