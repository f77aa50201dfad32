"""A system that answers, crashes, hangs or refuses, as its mode says. Run as a script."""

import os
import signal
import sys
import time

from bench.peers.wire import Answer, Ask, Load, peak_mb, serve


class Fake:
    def load(self, load: Load) -> str:
        self.mode = load.mode
        self.asked = 0
        print("a library that talks on standard output")
        if self.mode == "no load":
            raise RuntimeError("cannot read this file")
        return "fake 1"

    def generate(self, ask: Ask) -> Answer:
        self.asked += 1
        if self.mode == "crash":
            print("last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.mode == "hang" or (self.mode == "hang later" and self.asked > 2):
            time.sleep(600)
        if self.mode == "refuse":
            raise ValueError("not this prompt")
        tokens = [ask.prompt[-1], ask.seed, self.asked][: ask.max_tokens]
        return Answer(tokens, 0.1, 0.1 + 0.01 * len(tokens), len(tokens))

    def peak_mb(self) -> float:
        return peak_mb()


if __name__ == "__main__":
    serve(Fake)
