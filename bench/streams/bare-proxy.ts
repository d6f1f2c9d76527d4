/**
 * A process that passes requests on and their answers back, as they come, and does nothing else: what any proxy in Node costs. To the fake
 * engines' HTTP, in turns. Arguments: FOLDER ENGINES. Prints its URL.
 */
import { Agent, createServer, request } from 'node:http';
import type { AddressInfo } from 'node:net';

process.on('disconnect', () => process.exit()); // who started it has ended, however

const [folder, engines] = process.argv.slice(2);
const agent = new Agent({ keepAlive: true });
let turn = 0;

const server = createServer((asked, answer) => {
  const socketPath = `${folder}/h${turn++ % Number(engines)}`;
  const { url: path, method, headers } = asked;
  const onward = request({ agent, socketPath, path, method, headers }, (response) => {
    answer.writeHead(response.statusCode!, response.headers);
    response.pipe(answer);
  });
  onward.on('error', () => answer.destroy());
  asked.pipe(onward);
});
server.listen(0, '127.0.0.1', () => {
  process.stdout.write(`http://127.0.0.1:${(server.address() as AddressInfo).port}\n`);
});
