"""`python -m llmcomp`."""

import sys

from llmcomp.cli import main

sys.exit(main())
