"""Imports what every worker needs, quickly.

Imports make objects that stay. While they become more, Python's garbage collector would look through them again and
again, which is a fifth of the time that torch and Lightning take to import; so it rests meanwhile. Afterwards it never
looks at them, which also keeps the memory pages shared that forked workers have of the fork server.
"""

import gc

gc.disable()
try:
    import hydra  # noqa: F401

    import lockstep.callbacks
    import lockstep.data
    import lockstep.loggers
    import lockstep.model
    import lockstep.plugins
    import lockstep.training  # noqa: F401
finally:
    gc.freeze()
    gc.enable()
