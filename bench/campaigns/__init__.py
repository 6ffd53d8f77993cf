"""Runs that take long: started by hand, results kept in `bench/results/`. Each has a short twin among the tests."""
