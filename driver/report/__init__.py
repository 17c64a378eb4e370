"""Output for people: text, pages, pictures."""
