"""Devices and models that are none: a pass takes a stated time, and tokens come from a seeded table.

    pass_time.py  what a pass takes
    text.py       the tokens: what a target writes, and what a drafter that agrees with it at a stated rate proposes
    runner.py     the `ModelRunner` of these two

Everything around a pass is the real thing: batching, pages, rollback, sampling, judging, the wire. So what a fleet of
simulated devices does not reach of its ideal (`paceline.benchmark.ideal`) is what the software costs. What a GPU would
hide, launching passes that nobody waits for, the simulated one hides too.
"""
