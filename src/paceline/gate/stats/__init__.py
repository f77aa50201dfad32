"""Statistics of the gate: intervals that hold however often somebody looks, as pure functions of arrays.

interval       an interval of plausible values
mean           confidence sequence for a mean of unbounded values (log ratios of latencies)
bounded_mean   betting confidence sequence for a mean of bounded values (differences of rates and scores)
quantile       confidence sequence for a quantile, by order statistics
permutation    two-sample tests of texts: is it the same distribution?
"""
