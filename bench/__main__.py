"""`python -m bench NAME ...`: each subcommand is the `main(argv)` of the module of that name, with _ for -.

Exit status: what the command says; 2 for what the user can put right, in one line; 130 after Ctrl-C.
"""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "scheduler": "host time of Engine.step()",
    "simulate": "the real scheduler over request traces, without a model",
    "replay": "execute a plan recording again and report the first difference",
    "sweep": "prefill and decode over batch sizes and contexts, with the fraction of the limit",
    "throughput": "a request trace through the engine: tokens a second, latencies, what each bucket took",
    "plot": "charts of a sweep's results",
    "readme_table": "the README's benchmark table from the checked-in results",
    "coldstart": "process start to first token, by phase",
    "serve": "drive a running server with a request trace",
    "serving": "what the HTTP server costs beside the bare engine",
    "check-server": "does a server that speaks OpenAI's API keep its promises?",
    "kernels": "check and time each kernel",
    "drafts": "what drafts bring to one user",
    "cpu_compare": "CPU speed against transformers",
    "cloc": "code size by component",
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in COMMANDS:
        print("usage: python -m bench COMMAND [options]\n")
        for name, text in COMMANDS.items():
            print(f"  {name:12} {text}")
        return 0 if argv in ([], ["-h"], ["--help"]) else 2
    try:
        if argv[0] in ("serve", "serving", "check-server"):
            from resin.plan.extras import require

            require("serve")
        return int(importlib.import_module(f"bench.{argv[0].replace('-', '_')}").main(argv[1:]) or 0)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except Exception as error:
        from resin import ResinError  # only now: how long imports take is measured as well

        if not isinstance(error, ResinError | OSError):
            raise
        print(f"bench {argv[0]}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
