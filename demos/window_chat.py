"""A chat window, with the Tk that comes with Python.

    python demos/window_chat.py
    python demos/window_chat.py --model my-model

Enter sends, Shift-Enter starts a new line, Escape stops an answer. The window opens at once, while the model is
still loading.
"""

import argparse
import sys
import tkinter as tk
from collections.abc import Callable
from queue import Empty
from tkinter import font, ttk

from background_chat import BackgroundChat, Event
from code_fences import CodeFences

from edgespec import Engine, Stats, load

_POLL_MS = 30  # only the main thread may call Tk, so it polls the queue of events
_ENDINGS = {
    "length": "token limit reached, ",
    "context": "context is full, ",
    "cancelled": "stopped, ",
    "loop": "it repeated itself, ",
}
_SHIFT = 1


class Window:
    """The widgets, and the events that they show."""

    def __init__(self, root: tk.Tk, load_engine: Callable[[Callable[[str], None]], Engine]) -> None:
        self.root = root
        self._lay_out()
        self.chat = BackgroundChat(load_engine)
        self._fences = CodeFences()
        self._is_ready = self._is_answering = False
        self._refresh()
        root.protocol("WM_DELETE_WINDOW", self.close)
        self._poll = root.after(_POLL_MS, self._take_events)

    def _lay_out(self) -> None:
        self.root.title("edgespec")
        self.root.geometry("680x560")
        self.root.minsize(360, 240)
        self.root.columnconfigure(0, weight=1)
        self.root.rowconfigure(0, weight=1)
        if self.root.tk.call("tk", "windowingsystem") == "x11":
            ttk.Style().theme_use("clam")  # the default theme of X11 looks like 1990
        self.root.configure(background=ttk.Style().lookup("TFrame", "background"))
        letters = font.nametofont("TkTextFont").copy()
        letters.configure(size=11)
        fixed = font.nametofont("TkFixedFont").copy()
        fixed.configure(size=10)
        self._fonts = (letters, fixed)  # Tk frees a font without a reference
        self.log = tk.Text(
            self.root,
            wrap="word",
            state="disabled",
            font=letters,
            relief="flat",
            padx=16,
            pady=12,
            spacing2=3,
            highlightthickness=0,
        )
        self.log.tag_configure("user", foreground="#2459d3", spacing1=14, spacing3=4)
        self.log.tag_configure("code", font=fixed, background="#f1f3f6", lmargin1=12, lmargin2=12, wrap="none")
        self.log.tag_configure("note", foreground="#697586", font=("TkSmallCaptionFont",), spacing1=4)
        bar = ttk.Scrollbar(self.root, command=self.log.yview)
        self.log.configure(yscrollcommand=bar.set)
        self.log.grid(row=0, column=0, sticky="nsew")
        bar.grid(row=0, column=1, sticky="ns")
        below = ttk.Frame(self.root, padding=(12, 10))
        below.grid(row=1, column=0, columnspan=2, sticky="ew")
        below.columnconfigure(0, weight=1)
        self.entry = tk.Text(below, height=2, wrap="word", font=letters, padx=8, pady=6, undo=True)
        self.entry.configure(
            relief="flat", highlightthickness=1, highlightbackground="#b8bfc9", highlightcolor="#2459d3"
        )
        self.entry.grid(row=0, column=0, sticky="ew", padx=(0, 10))
        self.button = ttk.Button(below, command=self._press)
        self.button.grid(row=0, column=1)
        self.status = ttk.Label(below, text="Loading the model …", foreground="#697586")
        self.status.grid(row=1, column=0, columnspan=2, sticky="w", pady=(8, 0))
        self.entry.bind("<Return>", self._on_return)
        self.root.bind("<Escape>", lambda event: self.chat.stop())
        self.entry.focus_set()

    def _on_return(self, event: "tk.Event[tk.Text]") -> str | None:
        if int(event.state) & _SHIFT:
            return None  # Tk inserts the line break
        self.send()
        return "break"

    def _press(self) -> None:
        if self._is_answering:
            self.chat.stop()
        else:
            self.send()

    def send(self) -> None:
        question = self.entry.get("1.0", "end").strip()
        if question and self._is_ready and not self._is_answering:
            self.entry.delete("1.0", "end")
            self._write(question + "\n", "user")
            self._is_answering = True
            self._refresh()
            self.chat.ask(question)

    def close(self) -> None:
        """Close the window, which ends the answer."""
        self.root.after_cancel(self._poll)
        self.root.destroy()
        self.chat.close()

    def _take_events(self) -> None:
        while True:
            try:
                event = self.chat.events.get_nowait()
            except Empty:
                break
            self._show(event)
        self._poll = self.root.after(_POLL_MS, self._take_events)

    def _show(self, event: Event) -> None:
        if event.kind == "text":
            self._write_answer(self._fences.push(event.text))
            return
        if event.kind == "stage":
            self.status["text"] = event.text
        elif event.kind == "ready":
            self._is_ready = True
            self.root.title(event.text)
            self.status["text"] = f"{event.text} is ready. Enter sends, Escape stops."
        else:
            self._write_answer(self._fences.end())
            self._fences = CodeFences()
            text = event.text if event.stats is None else _ENDINGS.get(event.text, "") + summary(event.stats)
            self._write(f"\n{text}\n", "note")
            if not self._is_ready:
                self.status["text"] = "The model could not be loaded."
            self._is_answering = False
        self._refresh()

    def _refresh(self) -> None:
        self.button["text"] = "Stop" if self._is_answering else "Send"
        self.button["state"] = "normal" if self._is_ready else "disabled"

    def _write_answer(self, pieces: list[tuple[str, bool]]) -> None:
        for text, is_code in pieces:
            self._write(text, "code" if is_code else "")

    def _write(self, text: str, tag: str = "") -> None:
        """Append text, and keep the end in sight if it was in sight before."""
        is_at_end = self.log.yview()[1] >= 0.999
        self.log["state"] = "normal"
        self.log.insert("end", text, tag)
        self.log["state"] = "disabled"
        if is_at_end:
            self.log.see("end")


def summary(stats: Stats) -> str:
    parts = [f"{stats.tokens_per_pass:.2f} tokens per pass"]
    if stats.decode_tokens_per_second:
        parts.insert(0, f"{stats.decode_tokens_per_second:.1f} tokens/s")
    if stats.acceptance_rate is not None:
        parts.append(f"{stats.acceptance_rate:.0%} of drafted tokens accepted")
    return ", ".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description="Chat in a window.")
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    try:
        root = tk.Tk()
    except tk.TclError as error:
        print(f"window_chat: no window can be opened ({error})", file=sys.stderr)
        return 1
    Window(root, lambda report: load(options.model, report=report))
    root.mainloop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
