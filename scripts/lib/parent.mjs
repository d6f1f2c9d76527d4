/**
 * npm passes SIGINT and SIGTERM on to us; of SIGHUP and SIGKILL it just dies. Whoever started npm means the system by it, so its end, whatever
 * the reason, is a SIGTERM for us.
 */
const lookEveryMs = 250;

export function endWithParent() {
  const parent = process.ppid;
  const timer = setInterval(() => {
    if (process.ppid === parent) return;
    clearInterval(timer);
    process.kill(process.pid, 'SIGTERM');
  }, lookEveryMs);
  timer.unref();
}
