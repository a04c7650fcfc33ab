import sys

from verl.doctor.command import main

sys.exit(main())
