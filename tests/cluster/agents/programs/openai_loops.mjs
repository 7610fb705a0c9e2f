// The official client for Node: runTools, the stream helper, zod's types in chats and responses.
import OpenAI from 'openai'
import { zodFunction, zodResponseFormat, zodResponsesFunction, zodTextFormat } from 'openai/helpers/zod'
import { check, City, HUGE, MODEL, PIXEL, refused, RESULTS, run, same, URL } from './loops.mjs'

const client = new OpenAI({ baseURL: URL, apiKey: 'none', maxRetries: 0, timeout: 100_000 })
const OPTIONS = { model: MODEL, temperature: 0, seed: 1, max_completion_tokens: 150 }
const QUESTION = [{ role: 'system', content: 'Be brief.' }, { role: 'user', content: 'How is the weather in Rome?' }]
const parameters = { type: 'object', properties: { city: { type: 'string', enum: ['Rome', 'Oslo'] } }, required: ['city'] }
const weather = { type: 'function', function: { name: 'weather', parameters, parse: JSON.parse, function: ({ city }) => RESULTS[city] } }
const read = { type: 'function', function: { name: 'read', parameters: { type: 'object', properties: {} }, function: () => HUGE } }

async function tools(stream) {
  const options = stream ? { stream, stream_options: { include_usage: true } } : {}
  const asked = { ...OPTIONS, messages: QUESTION, tools: [weather, read], tool_choice: 'required', parallel_tool_calls: false }
  const runner = client.chat.completions.runTools({ ...asked, ...options }, { maxChatCompletions: 3 })
  await runner.done()
  check((await runner.totalUsage()).total_tokens > 0, 'no usage')
  const calls = runner.messages.flatMap(message => message.tool_calls ?? [])
  check(calls.length === 3, runner.messages)
  return calls.map(call => [call.function.name, call.function.arguments])
}

async function typed(stream) {
  const messages = [...QUESTION]
  const asked = { ...OPTIONS, tools: [zodFunction({ name: 'plan', parameters: City })], parallel_tool_calls: false }
  const tool_choice = { type: 'function', function: { name: 'plan' } }
  for (let step = 0; step < 3; step++) {
    const body = { ...asked, messages, tool_choice }
    const answer = stream
      ? await client.chat.completions.stream({ ...body, stream_options: { include_usage: true } }).finalChatCompletion()
      : await client.chat.completions.parse(body)
    const { message } = answer.choices[0]
    check(message.tool_calls.length === 1 && answer.usage.total_tokens > 0, answer)
    const [call] = message.tool_calls
    City.parse(call.function.parsed_arguments)
    messages.push(message, { role: 'tool', tool_call_id: call.id, content: [{ type: 'text', text: RESULTS.Rome }] })
  }
  const body = { ...OPTIONS, messages, response_format: zodResponseFormat(City, 'city') }
  const last = stream ? await client.chat.completions.stream(body).finalChatCompletion() : await client.chat.completions.parse(body)
  return City.parse(last.choices[0].message.parsed)
}

async function responses(store, stream) {
  let input = [...QUESTION], previous_response_id
  const kinds = []
  for (let step = 0; step < 3; step++) {
    const body = {
      model: MODEL, input, store, temperature: 0, max_output_tokens: 150, parallel_tool_calls: false,
      tools: [zodResponsesFunction({ name: 'plan', parameters: City })], tool_choice: step < 2 ? 'required' : 'none',
      ...(store ? { previous_response_id } : { include: ['reasoning.encrypted_content'] }),
      ...(step < 2 ? {} : { text: { format: zodTextFormat(City, 'city') } }),
    }
    const response = stream ? await client.responses.stream(body).finalResponse() : await client.responses.parse(body)
    check(response.status === 'completed' && response.usage.total_tokens > 0, response)
    const calls = response.output.filter(item => item.type === 'function_call')
    const results = calls.map(call => ({ type: 'function_call_output', call_id: call.call_id, output: RESULTS.Rome }))
    input = store ? results : [...input, ...response.output, ...results]
    previous_response_id = response.id
    kinds.push(...response.output.map(item => item.type))
    if (step === 2) City.parse(response.output_parsed)
  }
  same(kinds, ['function_call', 'function_call', 'message'])
  return kinds
}

async function aborted() {
  const stream = client.chat.completions.stream({ ...OPTIONS, temperature: 1, max_completion_tokens: 400, messages: QUESTION })
  stream.on('chunk', () => stream.abort())
  await stream.done().then(() => check(false, 'went on'), error => check(error instanceof OpenAI.APIUserAbortError, error.stack))
}

await run('runTools', async () => same(await tools(false), await tools(true)))
await run('chat', async () => same(await typed(false), await typed(true)))
for (const store of [true, false]) for (const stream of [true, false])
  await run(`responses, store ${store}, stream ${stream}`, () => responses(store, stream))
await run('aborted', aborted)
const picture = [{ role: 'user', content: [{ type: 'image_url', image_url: { url: PIXEL } }] }]
await refused('image', () => client.chat.completions.create({ ...OPTIONS, messages: picture }), 'only text parts are supported')
