"""A headless Chromium, driven through its DevTools protocol with the standard library alone."""

import json
import os
import select
import shutil
import subprocess
from base64 import b64decode

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
         "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe"]


class Browser:
    """One page. The protocol is JSON in both directions, each message ended by a zero byte; Chromium reads it from
    descriptor 3 and writes to 4, here two named pipes."""

    def __init__(self, folder):
        ways = [str(folder / "in"), str(folder / "out")]
        for way in ways:
            os.mkfifo(way)
        self.to, self.back = (os.open(way, os.O_RDWR) for way in ways)  # both ways: opening waits for nobody
        self.process = subprocess.Popen(
            ["sh", "-c", 'in=$1 out=$2; shift 2; exec "$@" 3<"$in" 4>"$out"', "sh", *ways, PROGRAM, *FLAGS,
             f"--user-data-dir={folder / 'profile'}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.number, self.buffer, self.session = 0, b"", {}
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        self.send("Page.enable")

    def close(self):
        self.process.terminate()
        self.process.wait()
        os.close(self.to)
        os.close(self.back)

    def receive(self):
        while b"\0" not in self.buffer:
            assert select.select([self.back], [], [], 60)[0], "the browser says nothing"
            self.buffer += os.read(self.back, 1 << 20)
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def send(self, method, **params):
        self.number += 1
        text = json.dumps({"id": self.number, "method": method, "params": params, **self.session}) + "\0"
        os.write(self.to, text.encode("utf-8"))
        while (message := self.receive()).get("id") != self.number:
            pass
        assert "error" not in message, f"{method}: {message}"
        return message["result"]

    def size(self, width, height):
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=width < 600)

    def open(self, path):
        self.send("Page.navigate", url="about:blank")  # else a page that differs by its #part alone is not loaded
        self.send("Page.navigate", url=path.as_uri())
        while self.run("document.readyState + location.protocol") != "completefile:":
            pass

    def run(self, code):
        """The value of some JavaScript in the page."""
        result = self.send("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, key, code):
        text = {"Enter": "\r", " ": " "}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code,
                      **({"text": text} if text and kind == "keyDown" else {}))

    def picture(self, path, colours="light"):
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": colours}])
        path.write_bytes(b64decode(self.send("Page.captureScreenshot")["data"]))
