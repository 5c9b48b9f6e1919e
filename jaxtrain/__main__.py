"""python -m jaxtrain"""

from __future__ import annotations

from jaxtrain.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
