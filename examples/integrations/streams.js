/**
 * Streams that resume after a cut, without a library. `url` is SERVER/evaluation/ID/events.
 *
 * `jsonLines` runs in Node.js 18 and in browsers. `eventSource` and `webSocket` run in browsers
 * without tokens; `webSocket` also in Node.js 22, with a token by
 * `new WebSocket(address, { headers: { Authorization: "Bearer TOKEN" } })`.
 */

async function* jsonLines(url, count = 0) {
  for (;;) {
    let status;
    try {
      const headers = { Accept: "application/jsonl" };
      const answer = await fetch(`${url}?skip=${count}`, { headers });
      status = answer.status;
      let rest = "";
      for await (const chunk of answer.body.pipeThrough(new TextDecoderStream())) {
        const lines = (rest + chunk).split("\n");
        rest = lines.pop();
        for (const line of lines) {
          count += 1;
          yield JSON.parse(line);
        }
      }
      if (status === 200) return;
    } catch {
      // no answer, or a cut
    }
    if (status >= 400 && status < 500 && ![408, 429].includes(status)) throw new Error(status);
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

function eventSource(url, show, done, after = "") {
  const source = new EventSource(`${url}?after=${after}`);
  source.onmessage = (message) => {
    after = message.lastEventId;
    show(JSON.parse(message.data));
  };
  source.addEventListener("end", () => {
    source.close();
    done();
  });
  source.onerror = () => {
    if (source.readyState === EventSource.CLOSED) {
      setTimeout(eventSource, 2000, url, show, done, after);
    }
  };
}

function webSocket(url, show, done, count = 0) {
  const socket = new WebSocket(`${url.replace("http", "ws")}?skip=${count}`);
  let received = 0;
  socket.onmessage = (message) => {
    received += 1;
    show(JSON.parse(message.data));
  };
  socket.onclose = socket.onerror = ({ code }) => {
    socket.onclose = socket.onerror = null; // in Node.js an error may come alone
    if (code === 1000) return done();
    console.error(`WebSocket connection lost, or refused: ${socket.url}`);
    setTimeout(webSocket, 2000, url, show, done, count + received);
  };
}
