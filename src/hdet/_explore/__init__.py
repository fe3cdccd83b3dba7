"""What varies between replicas: hyperparameters, ladders, slots, and the values of one step."""
