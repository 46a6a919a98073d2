"""Imports what every worker needs, quickly.

Imports make objects that stay. As their number grows, Python's garbage collector would look through them again and
again, which is a fifth of the time that torch and Lightning take to import; so it rests meanwhile. Afterwards it never
looks at them, which also keeps their memory pages shared between the fork server and its workers.
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
