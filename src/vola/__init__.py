"""vola: robot demonstrations -> vision-language-action policies that can be taken apart, measured and trusted.

Importing this package does nothing and needs no torch; import the parts by name, e.g.
``from vola.systems import pi0``. Start reading at ARCHITECTURE.md.
"""

__version__ = "0.1.0"
