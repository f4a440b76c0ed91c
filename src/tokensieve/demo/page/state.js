// The settings of the page, their link, and requests to the server.

export const state = { model: "", sample: null, images: {}, files: {}, prompt: null, plans: [], batch: null };
const sent = new Map(); // image name of the server -> the user's file, to send it again

export function readLink() {
  const link = new URLSearchParams(location.hash.slice(1));
  const plans = link.getAll("plan").slice(0, 2);
  const number = link.get("sample");
  return {
    model: link.get("model") ?? "",
    sample: number !== null && /^[0-9]+$/.test(number) ? Number(number) : null,
    prompt: link.get("prompt"),
    plans,
    batch: Number(link.get("batch")) || null,
  };
}

export function link() {
  const made = new URLSearchParams({ model: state.model });
  if (state.sample !== null) made.set("sample", state.sample);
  if (state.prompt !== null) made.set("prompt", state.prompt);
  for (const plan of state.plans) made.append("plan", plan);
  if (state.batch !== null) made.set("batch", state.batch);
  return `${location.origin}/#${made}`;
}

export function updateLink() {
  history.replaceState(null, "", link());
}

export class RequestError extends Error {
  constructor(problem, status) {
    super(problem.message ?? String(problem));
    this.problem = problem;
    this.status = status;
  }
}

async function checked(response) {
  if (response.ok) return response;
  let problem;
  try {
    problem = (await response.json()).error;
  } catch {
    problem = { message: `the server answered ${response.status}` };
  }
  throw new RequestError(problem ?? { message: `the server answered ${response.status}` }, response.status);
}

async function reach(address, options) {
  try {
    return await fetch(address, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError({ message: "the server does not answer: is tokensieve demo still running?" }, 0);
  }
}

export async function get(address) {
  return (await checked(await reach(address))).json();
}

export async function post(address, body, signal) {
  const options = () => ({ method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });
  let response = await reach(address, options());
  if (response.status === 410) {
    for (const name of new Set(Object.values(body.images))) if (sent.has(name)) await upload(sent.get(name));
    response = await reach(address, options());
  }
  for (let tries = 0; response.status === 503 && tries < 20; tries++) {
    await new Promise((done) => setTimeout(done, 300));
    if (signal?.aborted) throw new DOMException("aborted", "AbortError");
    response = await reach(address, options());
  }
  return checked(response);
}

export async function upload(file) {
  const answer = await (await checked(await reach("/api/images", { method: "POST", body: file }))).json();
  sent.set(answer.image, file);
  return answer;
}

export function question() {
  return { model: state.model, images: state.images, files: state.files, prompt: state.prompt ?? "", plans: state.plans };
}

export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.includes("-") || key === "role" || key === "scope") made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children);
  return made;
}
