"""Python runs this by itself at the start of a process that has the folder on ``PYTHONPATH``: the schedulers'.

``DFLASH2_RECORD`` names a file in which the drafter's steps are noted there.
"""

import os

import absent

absent.install()
if os.environ.get("DFLASH2_RECORD"):
    import recording

    recording.install(os.environ["DFLASH2_RECORD"])
