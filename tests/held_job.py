"""train.py, but a run that finds the file `hold` waits for SIGINT before its fourth step."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from conf import cli

if __name__ == "__main__":
    CONFIG = cli.parse(sys.argv[1:], script="train.py", purpose="")

    import train

    train_step = train.train_step

    def step(state: Any, *arguments: Any, **options: Any) -> Any:
        if state.step == 3 and Path("hold").exists():
            Path("hold").unlink()
            received = list[int]()
            before = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
            Path("held").write_text(str(os.getpid()))
            while not received:
                time.sleep(0.05)
            signal.signal(signal.SIGINT, before)
            os.kill(os.getpid(), signal.SIGINT)
        return train_step(state, *arguments, **options)

    train.train_step = step
    sys.exit(train.main(CONFIG))
