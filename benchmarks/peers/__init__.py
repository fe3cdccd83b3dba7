"""What people use today when they do not know the learning rate, on the lab's tasks. Needs `pip install '.[peers]'`.

`optimizers.py` has those that bring an optimizer of their own, `hypergradient.py` a rate that follows its gradient,
`range_test.py` the classic test before the run, and `population.py` a population at equal total compute.
"""
