"""Plans and the planners that choose them; clusters, costs and the simulator that price them."""
