"""The expressions of the global program, numbered so that equal ones are one."""
