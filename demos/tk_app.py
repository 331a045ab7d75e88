"""A window that shows an answer while it is written, does not freeze meanwhile, and stops it.

    python demos/tk_app.py

Tk comes with Python (on Debian as python3-tk). Enter sends, Escape stops. Closing the window ends an answer, or
the loading of the model.
"""

import argparse
import tkinter as tk
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Thread
from tkinter import ttk

from edgespec import Conversation, EdgeSpecError, Engine, LoadProgress, Reply, load

ShowProgress = Callable[[LoadProgress], None]


class Closed(Exception):
    """The window was closed while the model was loaded."""


class Window:
    """The widgets, which the main thread alone touches, and a thread that loads the model or reads an answer."""

    def __init__(self, root: tk.Tk, open_engine: Callable[[ShowProgress], Engine]) -> None:
        self.root = root
        self.log = tk.Text(root, wrap="word", state="disabled", width=70, height=24)
        self.entry = ttk.Entry(root)
        self.button = ttk.Button(root, text="Send", state="disabled", command=self.send_or_stop)
        self.bar = ttk.Progressbar(root)
        self.log.pack(fill="both", expand=True)
        for widget in (self.bar, self.entry, self.button):
            widget.pack(fill="x")
        self.entry.bind("<Return>", lambda event: self.send_or_stop())
        root.bind("<Escape>", lambda event: self.stop())
        root.protocol("WM_DELETE_WINDOW", self.close)
        self.calls: SimpleQueue[Callable[[], object]] = SimpleQueue()  # for the main thread
        self.conversation: Conversation | None = None  # until the model is loaded
        self.reply: Reply | None = None  # while it is read
        self.is_closed = False
        self.thread = Thread(target=self.open, args=[open_engine])
        self.thread.start()
        self.run_calls()

    def run_calls(self) -> None:
        while not self.calls.empty():
            self.calls.get()()
        self.timer = self.root.after(30, self.run_calls)

    # In the thread.

    def open(self, open_engine: Callable[[ShowProgress], Engine]) -> None:
        try:
            engine = open_engine(self.report)
        except EdgeSpecError as error:
            self.calls.put(partial(self.write, f"The model could not be loaded: {error}\n"))
        except Closed:
            pass
        else:
            self.conversation = engine.chat(overflow="drop-oldest", max_tokens=500, ends_loops=True)
            self.calls.put(self.refresh)

    def report(self, progress: LoadProgress) -> None:
        if self.is_closed:
            raise Closed
        self.calls.put(partial(self.bar.configure, value=100 * progress.done_bytes / progress.total_bytes))

    def read(self, reply: Reply) -> None:
        try:
            with reply:
                for chunk in reply:
                    self.calls.put(partial(self.write, chunk.text))
        except EdgeSpecError as error:
            self.calls.put(partial(self.write, f"\n{error}"))
        self.calls.put(self.end)

    # In the main thread.

    def send_or_stop(self) -> None:
        if self.reply is not None:
            self.stop()
        elif self.conversation is not None and (question := self.entry.get().strip()):
            try:
                self.reply = self.conversation.stream(question)
            except EdgeSpecError as error:  # it is too long
                self.write(f"{error}\n")
                return
            self.entry.delete(0, "end")
            self.write(f"> {question}\n")
            self.refresh()
            self.thread = Thread(target=self.read, args=[self.reply])
            self.thread.start()

    def stop(self) -> None:
        if self.reply is not None:
            self.reply.cancel()  # read() gets a last chunk

    def end(self) -> None:
        self.write("\n\n")
        self.reply = None
        self.refresh()

    def refresh(self) -> None:
        self.bar.pack_forget()
        self.button.configure(text="Send" if self.reply is None else "Stop", state="normal")

    def write(self, text: str) -> None:
        self.log.configure(state="normal")
        self.log.insert("end", text)
        self.log.configure(state="disabled")
        self.log.see("end")

    def close(self) -> None:
        self.is_closed = True
        self.stop()
        self.root.after_cancel(self.timer)
        self.root.destroy()
        self.thread.join()
        if self.conversation is not None:
            self.conversation.engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask in a window.")
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    root = tk.Tk()
    root.title("edgespec")
    Window(root, lambda progress: load(options.model, progress=progress))
    root.mainloop()


if __name__ == "__main__":
    main()
