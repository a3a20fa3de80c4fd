// Browsers start no worker for a page that was opened as a file. There the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.frame = frame;
      const page = frame.contentDocument;
      // The script posts its answers to this page, and reads scripts of its own one after the other.
      frame.contentWindow.parent = window;
      frame.contentWindow.postMessage = undefined;
      page.open();
      page.write("<script>" +
        "var answers = [];" +
        "postMessage = function (data) { parent.dispatchEvent(new MessageEvent('worker', {data: data})); };" +
        "importScripts = function (...urls) {" +
        "  return urls.reduce((before, url) => before.then(() => new Promise((done, failed) => {" +
        "    const script = document.createElement('script');" +
        "    script.src = url; script.onload = done; script.onerror = failed;" +
        "    document.body.append(script);" +
        "  })), Promise.resolve());" +
        "};" +
        "</script><body></body>");
      page.close();
    }
  };
}
