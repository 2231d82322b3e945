"""Makes the golden logits of the tiny models with transformers (extra "reference").

    python -m tests.models.make_goldens            # writes tests/data/goldens/*.npz
    python -m tests.models.make_goldens --check    # recomputes and compares, writes nothing

transformers loads the random checkpoint that `resin.models.testing` makes of our own declarations, and refuses missing
and unexpected tensors: so names and shapes are checked as well as numbers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

from resin.models.testing import TINY_CONFIGS, dequantised_checkpoint, random_checkpoint, write_checkpoint
from tests.conformance.example import write_example

DIRECTORY = Path(__file__).resolve().parent.parent / "data" / "goldens"
EXAMPLE = "arcee"  # of docs/adding-a-model.md
SEED = 5
TOKENS = 40  # five windows of the tiny models
PREFILL_TOKENS = 13
TOLERANCE = 2e-6  # of the logits' standard deviation: two builds of one library


def golden(family: str) -> dict[str, np.ndarray]:
    """Token ids [40] and logits [40, 256] of one family, computed in one pass and step by step."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    ids = np.random.default_rng(11).integers(3, 256, TOKENS).astype(np.int32)
    with tempfile.TemporaryDirectory() as parent:
        model, report = AutoModelForCausalLM.from_pretrained(
            _write(family, Path(parent)), dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    faults = {name: sorted(found) for name, found in report.items() if found}
    if faults:
        raise SystemExit(f"{family}: transformers reports {faults}")
    batch = torch.from_numpy(ids.astype(np.int64))[None]
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        whole = model(input_ids=batch, use_cache=False).logits[0].numpy()
        stops = [PREFILL_TOKENS, *range(PREFILL_TOKENS + 1, TOKENS + 1)]
        steps = [
            model(input_ids=batch[:, start:stop], cache=cache, use_cache=True).logits[0].numpy()
            for start, stop in zip([0, *stops], stops, strict=False)
        ]
    drift = float(np.abs(np.concatenate(steps) - whole).max() / whole.std())
    if drift > 2e-5:
        raise SystemExit(f"{family}: transformers' cached steps differ from one pass by {drift:.1e}")
    return {"token_ids": ids, "logits": whole}


def _write(family: str, parent: Path) -> Path:
    if family == EXAMPLE:
        return write_example(parent)
    checkpoint = random_checkpoint(TINY_CONFIGS[family], seed=SEED)
    return write_checkpoint(parent / family, dequantised_checkpoint(checkpoint))


def main() -> int:
    """Returns 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=[*TINY_CONFIGS, EXAMPLE], metavar="FAMILY")
    parser.add_argument("--check", action="store_true", help="compare with the stored files")
    args = parser.parse_args()
    failed = False
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for family in args.families:
        made, path = golden(family), DIRECTORY / f"{family}.npz"
        if args.check:
            stored = np.load(path)["logits"]
            difference = float(np.abs(made["logits"] - stored).max() / stored.std())
            failed |= difference > TOLERANCE
            print(f"{family}: {difference:.1e} of the logits' deviation")
        else:
            np.savez_compressed(path, **made)
            print(f"{path.name}: {path.stat().st_size} bytes, logit deviation {made['logits'].std():.2f}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
