// Browsers start no worker for a page that was opened as a file. There the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  const load = (page, url) => new Promise((done, failed) => {
    const script = page.createElement("script");
    script.src = url;
    script.onload = done;
    script.onerror = failed;
    page.body.append(script);
  });

  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<body></body>";
      this.scope = new Promise((done) => {
        frame.onload = async () => {
          const scope = frame.contentWindow;
          scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", {data}));
          scope.importScripts = async (...urls) => {
            for (const one of urls) await load(scope.document, one);
          };
          await load(scope.document, url);
          done(scope);
        };
      });
      document.body.append(frame);
    }

    async postMessage(data) {
      (await this.scope).dispatchEvent(new MessageEvent("message", {data}));
    }
  };
}
