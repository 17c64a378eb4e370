"""Is a program well formed?"""
