"""Imports what every worker needs, quickly.

An import makes objects that stay. Python's garbage collector would look through them again and again as they become
more, which is a fifth of the time that torch and Lightning take to import; so it rests meanwhile. What is there
afterwards it never looks at again, which also keeps the pages shared that forked workers have of their parent.
"""

import gc

gc.disable()
try:
    import hydra  # noqa: F401

    import lockstep.callbacks
    import lockstep.checkpoints
    import lockstep.data
    import lockstep.loggers
    import lockstep.model
    import lockstep.stopping
    import lockstep.training  # noqa: F401
finally:
    gc.freeze()
    gc.enable()
