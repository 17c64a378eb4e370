"""Orders of a step's ops that hide communication behind compute."""
