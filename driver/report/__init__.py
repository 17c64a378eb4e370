"""What people are shown: text, pages, pictures."""
