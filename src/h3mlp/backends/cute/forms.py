"""The two forms of mma.sync with E4M3, by name, and which architectures have which, the fastest first."""

PLAIN, UNIT_SCALE = "plain", "unit_scale"

OF = {"sm_89": (PLAIN,), "sm_120a": (UNIT_SCALE, PLAIN), "sm_121a": (UNIT_SCALE, PLAIN)}
