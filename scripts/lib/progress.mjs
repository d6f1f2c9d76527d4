/**
 * Progress for whatever takes longer than a second, on stderr (stdout is for results). On a terminal one line is
 * redrawn; elsewhere plain lines, first after a second, then every 15 s, so that a CI log neither stalls nor floods.
 */
const firstSignMs = 1_000;
const plainEveryMs = 15_000;
const frames = ['⠋', '⠙', '⠹', '⠸', '⠼', '⠴', '⠦', '⠧', '⠇', '⠏'];

/** Of those that are under way, the oldest one has the line of a terminal. */
const underWay = new Set();

const seconds = (ms) => `${(ms / 1000).toFixed(ms < 10_000 ? 1 : 0)} s`;

/**
 * Runs `work` as a named step. `work` receives `note(text)`, which shows what it is doing just now.
 * @template T
 * @param {string} name
 * @param {(note: (text: string) => void) => Promise<T>} work
 * @returns {Promise<T>}
 */
export async function step(name, work, stream = process.stderr) {
  const begin = Date.now();
  const live = Boolean(stream.isTTY) && !process.env.CI;
  let shown = false;
  let detail = '';
  let frame = 0;
  let lastPlain = 0;
  const self = {};
  underWay.add(self);
  const draw = () => {
    const elapsed = Date.now() - begin;
    const [oldest] = underWay;
    if (elapsed < firstSignMs || (live && oldest !== self)) return;
    if (live) {
      const width = (stream.columns ?? 80) - 1;
      const line = `${frames[frame++ % frames.length]} ${name} · ${seconds(elapsed)}${detail && ` · ${detail}`}`;
      stream.write(`\r\x1b[K${line.slice(0, width)}`);
    } else if (!shown || elapsed - lastPlain >= plainEveryMs) {
      stream.write(shown ? `  ${name}: ${seconds(elapsed)}${detail && ` (${detail})`}\n` : `${name} ...\n`);
      lastPlain = elapsed;
    }
    shown = true;
  };
  const timer = setInterval(draw, live ? 100 : 250);
  const end = (word) => {
    clearInterval(timer);
    underWay.delete(self);
    if (!shown) return;
    stream.write(`${live ? '\r\x1b[K' : ''}${name}: ${word} after ${seconds(Date.now() - begin)}\n`);
  };
  try {
    const result = await work((text) => {
      detail = text;
    });
    end('done');
    return result;
  } catch (error) {
    end('failed');
    throw error;
  }
}
