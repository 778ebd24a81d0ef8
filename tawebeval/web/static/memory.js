/** What this browser keeps for this server; nothing where it may not keep anything. */

const PREFIX = `tawebeval ${new URL("..", import.meta.url).pathname} `; // also below a proxy's path

export const memory = {
  get(name) {
    try {
      return JSON.parse(localStorage.getItem(PREFIX + name));
    } catch {
      return null;
    }
  },
  set(name, value) {
    try {
      if (value === null) localStorage.removeItem(PREFIX + name);
      else localStorage.setItem(PREFIX + name, JSON.stringify(value));
    } catch {
      // it works without
    }
  },
  clear() {
    try {
      const own = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
      for (const key of own) localStorage.removeItem(key);
    } catch {
      // there is nothing, then
    }
  },
};
