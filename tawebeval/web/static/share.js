/** Sharing of an evaluation by links that only read it. */

import { Client } from "./client.js";
import { announce, byId, copy, duration, element, isBusy, said, setBusy } from "./dom.js";
import { formatTime, say } from "./language.js";

const FRAGMENT = /^#shared\/((?:[a-z0-9]{1,16}-)?[a-z2-7]{40})\/(link_[A-Za-z0-9_-]{28})$/;

/** Return what a fragment of a shared page names, `{ id, link }`; null if it is none. */
export function readSharedFragment(fragment) {
  const [, id, link] = FRAGMENT.exec(fragment) ?? [];
  return id === undefined ? null : { id, link };
}

/** The part of an evaluation that makes links, copies them and revokes all. */
export class Share {
  /** `find` returns the `id` of the evaluation that is shown, and the `token`. */
  constructor(find) {
    this.find = find;
    byId("share-make").addEventListener("click", ({ target }) => this.#make(target));
    byId("share-revoke").addEventListener("click", ({ target }) => this.#revoke(target));
    byId("share-copy").addEventListener("click", ({ target }) => {
      copy(target, byId("share-link").value);
    });
    byId("share").addEventListener("toggle", () => this.clear());
  }

  /** Show no link any more, such as that of another evaluation. */
  clear() {
    byId("share-result").hidden = true;
    byId("share-hint").textContent = "";
    byId("share-link").value = "";
  }

  async #make(button) {
    await this.#ask(button, async (client, id) => {
      const { link, expires } = await makeLink(client, id);
      if (id !== this.find().id) return; // another one is shown by now
      const url = new URL(location.href);
      url.hash = `#shared/${id}/${link}`;
      byId("share-link").value = url.href;
      byId("share-result").hidden = false;
      byId("share-link").select();
      this.#say(say("The link works until {time}.", { time: formatTime(expires) }));
    });
  }

  async #revoke(button) {
    await this.#ask(button, async (client, id) => {
      await client.revokeLinks(id, { tries: 2 });
      if (id !== this.find().id) return;
      this.clear();
      this.#say(say("No link to this evaluation works any more."));
    });
  }

  async #ask(button, request) {
    if (isBusy(button)) return;
    setBusy(button, true);
    const { id, token } = this.find();
    try {
      await request(new Client({ token }), id);
    } catch (error) {
      if (id === this.find().id) this.#say(said(error));
    } finally {
      setBusy(button, false);
    }
  }

  #say(text) {
    byId("share-hint").textContent = text;
    announce(text);
  }
}

/** Make a link for the chosen time. If that is too long for the server, offer what it allows. */
async function makeLink(client, id) {
  const choice = byId("share-lifetime");
  try {
    return await client.makeLink(id, { lifetime: Number(choice.value), tries: 2 });
  } catch (error) {
    const longest = error.problem?.limit;
    if (error.status !== 400 || !(longest > 0)) throw error;
    for (const option of [...choice.options]) {
      if (Number(option.value) >= longest) option.remove();
    }
    const days = Math.floor(longest / 86_400);
    const time = days > 1 ? say("{n} days", { n: days }) : duration(longest);
    const words = say("{time}, the longest here", { time });
    choice.append(element("option", { value: longest, selected: true }, words));
    return client.makeLink(id, { lifetime: longest, tries: 2 });
  }
}
