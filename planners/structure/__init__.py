"""The linear maps and layers that planners read off a program."""
