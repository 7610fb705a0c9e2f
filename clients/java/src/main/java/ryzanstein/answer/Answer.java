package ryzanstein.answer;

import com.google.protobuf.Duration;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.io.PrintStream;
import java.util.ArrayList;
import java.util.EnumSet;
import java.util.Iterator;
import java.util.List;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.TimeUnit;
import ryzanstein.v1.Inference;
import ryzanstein.v1.InferenceServiceGrpc;
import ryzanstein.v1.InferenceServiceGrpc.InferenceServiceBlockingStub;

/**
 * Reads an answer to its end, whichever routers and connections are lost meanwhile.
 *
 * <p>{@code mvn -q compile exec:java -Dexec.args="127.0.0.1:50051,127.0.0.1:50053 'Count from 1 to 40.'"}
 *
 * <p>A begin has a key, so that it may be sent again; a started answer is attached to at the next index, at the next router.
 */
public final class Answer {
  private static final long PATIENCE_MS = 30_000;
  private static final long FIRST_WAIT_MS = 50;
  private static final long MOST_WAIT_MS = 2_000;
  private static final Set<Status.Code> LOST =
      EnumSet.of(Status.Code.UNAVAILABLE, Status.Code.UNKNOWN, Status.Code.INTERNAL);

  private final List<InferenceServiceBlockingStub> routers;
  private final Inference.ChatRequest begin;
  private final PrintStream out;
  private String generationId = "";
  private int index;
  private int router;
  private int failures;
  private long since;

  private Answer(List<InferenceServiceBlockingStub> routers, String content, PrintStream out) {
    this.routers = routers;
    this.out = out;
    this.begin =
        Inference.ChatRequest.newBuilder()
            .addMessages(Inference.Message.newBuilder().setRole(Inference.Role.ROLE_USER).setContent(content))
            .setSampling(Inference.SamplingParams.newBuilder().setTemperature(0))
            .setRequestId(UUID.randomUUID().toString())
            .build();
  }

  private void read() throws InterruptedException {
    while (true) {
      Context.CancellableContext call = Context.current().withCancellation();
      Context before = call.attach();
      try {
        if (readFrom(routers.get(router % routers.size()))) {
          return;
        }
        waitAfter(Status.UNAVAILABLE.withDescription("the stream ended before the answer did").asRuntimeException());
      } catch (StatusRuntimeException error) {
        waitAfter(error);
      } finally {
        call.detach(before);
        call.cancel(null); // also when an event was not the one expected: the router need not send the rest
      }
    }
  }

  /** Returns whether the answer is complete. */
  private boolean readFrom(InferenceServiceBlockingStub stub) {
    if (generationId.isEmpty()) {
      Iterator<Inference.StreamChatResponse> events =
          stub.streamChat(Inference.StreamChatRequest.newBuilder().setChat(begin).build());
      while (events.hasNext()) {
        if (take(events.next().getEvent())) {
          return true;
        }
      }
      return false;
    }
    Iterator<Inference.AttachGenerationResponse> events =
        stub.attachGeneration(
            Inference.AttachGenerationRequest.newBuilder()
                .setGenerationId(generationId)
                .putFromIndex(0, index)
                .build());
    while (events.hasNext()) {
      if (take(events.next().getEvent())) {
        return true;
      }
    }
    return false;
  }

  private boolean take(Inference.GenerationEvent event) {
    failures = 0;
    switch (event.getKindCase()) {
      case STARTED:
        generationId = event.getStarted().getGenerationId();
        return false;
      case DELTA:
        Inference.GenerationDelta delta = event.getDelta();
        if (delta.getFirstIndex() != index) {
          throw new IllegalStateException("token " + delta.getFirstIndex() + " came where " + index + " was expected");
        }
        index += delta.getTokenIdsCount();
        out.print(delta.getText());
        out.flush();
        return false;
      case FINISHED:
        out.println(event.getFinished().getText());
        return true;
      default:
        return false;
    }
  }

  /** Waits before the next router is tried. Throws the error if that is of no use. */
  private void waitAfter(StatusRuntimeException error) throws InterruptedException {
    RetryInfo asked = detail(error, RetryInfo.getDefaultInstance());
    boolean ofTransport = LOST.contains(error.getStatus().getCode()) && detail(error, ErrorInfo.getDefaultInstance()) == null;
    long now = System.nanoTime();
    since = failures == 0 ? now : since;
    if (asked == null && !ofTransport || TimeUnit.NANOSECONDS.toMillis(now - since) > PATIENCE_MS) {
      throw error;
    }
    long waitMs = Math.min(MOST_WAIT_MS, FIRST_WAIT_MS << Math.min(failures, 6));
    failures++;
    router++;
    Thread.sleep(Math.max(waitMs, asked == null ? 0 : milliseconds(asked.getRetryDelay())));
  }

  private static long milliseconds(Duration duration) {
    return TimeUnit.SECONDS.toMillis(duration.getSeconds()) + TimeUnit.NANOSECONDS.toMillis(duration.getNanos());
  }

  private static <T extends com.google.protobuf.Message> T detail(StatusRuntimeException error, T wanted) {
    com.google.rpc.Status status = StatusProto.fromThrowable(error);
    for (com.google.protobuf.Any any : status == null ? List.<com.google.protobuf.Any>of() : status.getDetailsList()) {
      if (any.getTypeUrl().endsWith("/" + wanted.getDescriptorForType().getFullName())) {
        try {
          @SuppressWarnings("unchecked")
          T found = (T) any.unpack(wanted.getClass());
          return found;
        } catch (com.google.protobuf.InvalidProtocolBufferException damaged) {
          return null;
        }
      }
    }
    return null;
  }

  /** Prints the answer to one message: {@code ROUTER[,ROUTER...] TEXT}. */
  public static void main(String[] arguments) throws InterruptedException {
    if (arguments.length != 2) {
      System.err.println("usage: answer ROUTER[,ROUTER...] TEXT");
      System.exit(2);
    }
    List<ManagedChannel> channels = new ArrayList<>();
    List<InferenceServiceBlockingStub> routers = new ArrayList<>();
    for (String address : arguments[0].split(",")) {
      ManagedChannel channel =
          ManagedChannelBuilder.forTarget(address)
              .usePlaintext()
              .disableRetry()
              .keepAliveTime(10, TimeUnit.SECONDS)
              .keepAliveTimeout(5, TimeUnit.SECONDS)
              .build();
      channels.add(channel);
      routers.add(InferenceServiceGrpc.newBlockingStub(channel));
    }
    try {
      new Answer(routers, arguments[1], System.out).read();
    } catch (StatusRuntimeException error) {
      System.err.println(error.getStatus());
      System.exit(1);
    } finally {
      channels.forEach(ManagedChannel::shutdownNow);
    }
  }
}
